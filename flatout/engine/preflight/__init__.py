"""Before a training begins: is there a GPU that can be used, and room on the disk for what will be saved?"""
