"""Label formats: one file each that reads it, and writes it where `flatout yolo convert-data` can.

Files:

    annotated    The form that every label format is read into and written from, and what the readers share
    coco         COCO: one JSON file with all images, boxes and polygons
    createml     CreateML: one JSON list for all images of a folder
    csv_tables   CSV files with one box per row: Open Images, TensorFlow and RetinaNet
    cvat         CVAT for images 1.1: one XML file with the shapes of all images
    huggingface  Hugging Face data sets on this disk: metadata files, parquet files, saved folders
    labelme      labelme: one JSON file per image, beside it
    registry     The label formats: how files are recognised, read and written
    sidecars     Formats with one label file per image that contains class names
    voc          Pascal VOC: one XML file per image
    yolo         YOLO text: one file per image
"""
