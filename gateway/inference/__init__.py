"""The OpenAI wire dialect: requests in, JSON and server-sent events out."""
