"""Federations on Flower: processes, keys, ports and the way of the bytes. Nothing here knows a method or a tensor.

    ServerApp -- SuperLink -- the server's door (`door.py`) == network == `protofed client`

The door lets through only what clients need, and holds a client's call for work until there is some. The client
(`client.py`) makes Flower's calls itself (`fleet.py`), in one process, and says in one line why a server cannot be
reached (`diagnose.py`). Nothing that arrives is executed on either side.
"""

from protofed.remote.flower.installed import need_flower

need_flower()  # before any module here imports Flower, or what comes with it
