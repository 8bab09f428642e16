"""Detection data sets: from YAML, folders, COCO JSON or VOC to checked labels and decoded pictures. No torch here."""
