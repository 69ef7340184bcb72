"""HTTP/1.1 as the gateway speaks it: connections, and the turns that requests and responses take on them."""
