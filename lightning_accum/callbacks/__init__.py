"""Small callbacks, one idea each."""
