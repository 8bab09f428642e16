"""The clock every part of flatout stamps, and facts about the machine it runs on."""
