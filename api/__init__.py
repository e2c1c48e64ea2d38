"""The OpenAI-compatible aiohttp server. Talks to the engine only through AsyncEngine."""
