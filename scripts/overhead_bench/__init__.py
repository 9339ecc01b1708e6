"""Parts of `bench_overhead.py`: each reports one kind of cost, as the lines of a Markdown table."""
