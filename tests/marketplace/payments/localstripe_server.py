"""A process that stands in for Stripe: localstripe on a port of this machine, which it prints once it listens.

Run as `python localstripe_server.py [PORT]`. localstripe keeps its state in a file at a fixed path; here it keeps it in
memory.
"""

from __future__ import annotations

import socket
import sys

from aiohttp import web
from localstripe import resources


def main() -> None:
    """Serve until the process is ended."""
    resources.Store.dump_to_disk = lambda self: None
    from localstripe.server import app

    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", int(sys.argv[1]) if len(sys.argv) > 1 else 0))
    listener.listen()
    print(listener.getsockname()[1], flush=True)
    web.run_app(app, sock=listener, print=None, access_log=None)


if __name__ == "__main__":
    main()
