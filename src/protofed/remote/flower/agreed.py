"""What the server's door and the clients agree on, apart from Flower's own messages."""

FLEET = "/v1/fleet/"  # the calls of Flower's clients
ABOUT = "/protofed"  # says the versions and the experiment to anybody who asks
UNKNOWN = 403  # the answer to somebody with another key,
STRANGER = b"this key is not in federation.toml\n"  # with these words: it is also Flower's to other things
UNSIGNED = 401  # the answer to a call that its key did not sign, or not now
FINISHED = 410  # the answer to a client that asks for work when the federation is over
HOLD_SECONDS = 20.0  # that a client waits for work in one call
