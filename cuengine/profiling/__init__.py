"""Where the time of a step goes: `cuengine profile` (cli/profile.py) is its command.

workload.py says what is run, run.py drives an engine through it, device.py and stream.py time a
device's operations, work.py counts their bytes and operations, recording.py keeps what was timed,
report.py makes tables of it and chrome_trace.py a trace file.
"""
