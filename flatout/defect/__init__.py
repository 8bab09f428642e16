"""Defect segmentation: find what is in one picture of a die and in neither of two others. See docs/defect.md."""
