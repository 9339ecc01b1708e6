"""The HTTP side: OpenAI schemas, streaming, and the bridge to the engine."""
