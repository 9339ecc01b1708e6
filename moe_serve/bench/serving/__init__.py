"""A load generator for any server of the OpenAI API, and the report of what it saw.

Arrivals, traces, prompts, parsing and statistics are pure; only `connection`, `client` and `runner`
touch a socket or a clock.
"""
