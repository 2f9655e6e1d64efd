"""A home for C and C++ programs: headers rendered from the specs, and a library with this engine behind it."""
