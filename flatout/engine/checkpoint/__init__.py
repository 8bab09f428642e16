"""Files of tensors and plain values: written so that they are whole or absent, read without running anything.

    write   content --container--> torch.save --atomic--> file
    read    file --opening--> archive (zip) --unpickle, vocabulary--> objects --plain--> content

What is read may come from anywhere, a file that claims to be ours included. docs/checkpoints.md has the rules.
"""
