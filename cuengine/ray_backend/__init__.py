"""Engines on many machines, as replicas of a Ray Serve deployment; needs the extra `ray`.

    settings.py        how many replicas, and where
    address.py         whether a cluster answers there
    environment.py     what Ray is told before it is imported
    start.py           puts all together
    leaving.py         ends all when a signal comes too early for an orderly end
    connection.py      this process's connection to Ray
    ray_log.py         what Ray says here
    client.py          RayEngine: what the server uses in place of AsyncEngine
    fleet.py           what RayEngine asks of the replicas, whoever runs them
    deployment.py      the replicas that Ray Serve runs: started, updated, asked
    watch.py           what the server learns of them beside their answers: number, log
    replica.py         one of them, with its engine's process
    replica_log.py     what it logs
    answers.py         the streams of its requests
    router.py          Ray Serve's choice of a replica for a request,
    prefix_routing.py  which is made there, and
    routing_here.py    what is known of it in the process that sends the requests
    messages.py        what client and replica say to each other
    attendance.py      which of them are still there

Ray is imported in replica.py, router.py, deployment.py and connection.py only, and nothing outside
imports these before the backend is chosen.
"""
