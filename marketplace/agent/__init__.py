"""The node process: it polls the server, and makes this machine's virtual machines and containers what the server asks.

Decisions are pure (`reconcile`), the machine's own records are the database, and the server is never connected to.
"""
