"""Small, slow, readable models of the compiled modules, to compare them with."""
