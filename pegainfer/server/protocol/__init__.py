"""Wire types: from JSON bodies to typed requests. No I/O, and nothing of the engine but its parameters."""
