"""The parts of scripts/train_tiny_model.py, one reason each."""
