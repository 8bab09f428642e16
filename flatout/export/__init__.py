"""Networks as files for other programs, whatever the job: the part of an export that knows no boxes and no defects.

    module --traced--> ONNX model in memory --simplified, facts, shapes--> --Session--> compared by the job --> file

Everything happens in memory. A file appears under its name when it is whole and the job has compared it, or not at all.
"""
