"""The operations of a step on the CPU, one by one, beside what the machine can do."""
