"""Where the time of a step goes: `cuengine profile` (cli/profile.py) is its command.

work.py counts bytes and operations, device.py times a device's operations, recording.py keeps what
was timed, run.py drives an engine, report.py makes tables of it and chrome_trace.py a trace file.
"""
