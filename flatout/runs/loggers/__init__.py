"""Loggers: callbacks that send the numbers of a training to files or other programs, whose packages are imported late.

Files:

    choose              The loggers of `--log-to`. None that sends data off the machine is on by default
    mlflow_tracking     Logger for MLflow (pip install mlflow-skinny). Logs to MLFLOW_TRACKING_URI
    plain_csv           Logger that writes every number of a training to scalars.csv in the run folder
    tensorboard         Logger for TensorBoard (pip install tensorboard): scalars, histograms and plots
    weights_and_biases  Logger for Weights & Biases (pip install wandb). Needs an account and a network
"""
