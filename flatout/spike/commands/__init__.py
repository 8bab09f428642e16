"""The commands of `flatout spike`, one file each: `main(argv)` parses, calls the library, prints."""
