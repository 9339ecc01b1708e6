"""Bodies of requests and answers, one module per route family."""
