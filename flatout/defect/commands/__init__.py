"""The commands of `flatout defect`: each parses, calls one library function, and prints its result."""
