"""The models on offer and the engine processes that serve them."""
