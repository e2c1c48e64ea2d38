"""Engines on many machines, as replicas of a Ray Serve deployment; needs the extra `ray`.

    settings.py        how many replicas, and where
    start.py           puts all together
    client.py          RayEngine: what the server uses in place of AsyncEngine
    fleet.py           what RayEngine asks of the replicas, whoever runs them
    deployment.py      the replicas that Ray Serve runs: started, updated, asked
    replica.py         one of them, with its engine's process
    answers.py         the streams of its requests
    router.py          Ray Serve's choice of a replica for a request,
    prefix_routing.py  which is made there, and
    routing_here.py    what is known of it in the process that sends the requests
    messages.py        what client and replica say to each other

Ray is imported in replica.py, router.py and deployment.py only, and nothing outside imports these
before the backend is chosen.
"""
