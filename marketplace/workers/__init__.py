"""What runs beside the requests: each worker is one pass, a function of the clock that may be killed and run again."""
