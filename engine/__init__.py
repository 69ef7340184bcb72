"""The inference engine: scheduler, paged KV cache, model runner, samplers, models. Usable without a server; imports
are lazy on torch.
"""
