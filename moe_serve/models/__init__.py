"""Decoders as data: a spec and a name map per family, one decoder that builds any of them."""
