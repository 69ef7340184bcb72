"""Networks of datacenters, their addresses, and the ports that nodes publish."""
