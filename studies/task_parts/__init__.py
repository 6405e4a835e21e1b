"""The parts of tasks.py: prompts and their scorers by task, a server's answers, and the figures."""
