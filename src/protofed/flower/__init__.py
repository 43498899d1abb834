"""Federations on Flower: processes, keys, ports and the way of the bytes. Nothing here knows a method or a tensor.

Both sides have a door of their own (`door.py`) between Flower and the network:

    ServerApp -- SuperLink -- the server's door == network == the client's door -- SuperNode -- ClientApp -- worker

The server's door lets nothing through but what clients need, and keeps them waiting until there is work; the client's
lets no other program in than the one in `app/`, and says in one line why a server cannot be reached.
"""
