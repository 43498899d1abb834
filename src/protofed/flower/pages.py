"""What `protofed federation init` writes for people and for systemd."""

README = """# The federation {name}

The server is `{server}`; clients connect to it, nobody connects to a client.

On the server's machine, with `server/` of this folder and nothing else:

    pip install 'protofed[flower]'
    protofed server server

On a client's machine, with its bundle (`clients/{first}/`, ...), copied in a safe way (it has a key):

    pip install 'protofed[flower]'
    protofed client {first} --data DATA --model MODEL --dry-run    # what would leave this machine
    protofed client {first} --data DATA --model MODEL

To run the server in the background: `protofed federation start {folder}`, `status`, `stop`.
With systemd: `protofed-server.service`, and `protofed-client.service` in every bundle.

Open port {port}/tcp on the server for the clients. Keep `server/ca.key` and `server/server.key` secret; `ca.key` is
only needed for `protofed federation renew`, so it may be kept elsewhere. Back up `server/`; delete a client's folder
here once its owner has it.
"""

CLIENT_README = """# The bundle of {name}

It belongs on the machine with the data of {name}, and nowhere else: `key` says who you are.

    pip install 'protofed[flower]'
    protofed client . --data DATA --model MODEL --dry-run    # what would leave this machine, without joining
    protofed client . --data DATA --model MODEL              # take part in the federation at {server}

`experiment.toml` is what you agree to train. Your model and prototypes stay in `state/`; keep that folder: it is what
lets you go on after a restart. Data never leaves the machine.
"""

SERVER_UNIT = """[Unit]
Description=protofed server of {name}
After=network-online.target
Wants=network-online.target

[Service]
User=protofed
WorkingDirectory=/srv/{name}
ExecStart={python} -m protofed server server
Restart=on-failure
RestartSec=5
TimeoutStopSec=30
KillMode=mixed
NoNewPrivileges=true
PrivateTmp=true
ProtectSystem=strict
ReadWritePaths=/srv/{name}

[Install]
WantedBy=multi-user.target
"""

CLIENT_UNIT = """[Unit]
Description=protofed client {name}
After=network-online.target
Wants=network-online.target

[Service]
User=protofed
WorkingDirectory=/srv/{name}
# The data file and the model of this site:
ExecStart={python} -m protofed client . --data DATA --model MODEL --wait 300
Restart=on-failure
RestartSec=10
TimeoutStopSec=30
KillMode=mixed
NoNewPrivileges=true
PrivateTmp=true
ProtectSystem=strict
ReadWritePaths=/srv/{name}

[Install]
WantedBy=multi-user.target
"""
