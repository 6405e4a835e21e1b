"""The parts of train_tiny_model.py, one reason each."""
