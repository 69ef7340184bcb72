"""The front door: HTTP, admission, metering, fleet and the command line. It composes the other floors."""
