"""Callbacks that pass a training's numbers on to other programs; a package that one needs is imported when it is used.

Files:

    choose              The loggers that `--log-to` can name. Nothing that leaves the machine is on unless it is named
    mlflow_tracking     A run in MLflow: pip install mlflow
    plain_csv           Every number of a training in one plain table, scalars.csv in the run folder
    tensorboard         Scalars and pictures for TensorBoard, where it is installed: pip install tensorboard
    weights_and_biases  A run in Weights & Biases: pip install wandb
"""
