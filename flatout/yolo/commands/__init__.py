"""The commands of `flatout yolo`, one file each: `main(argv)` parses, calls the library, prints."""
