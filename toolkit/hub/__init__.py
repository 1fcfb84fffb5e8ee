"""What comes out of a run, and its way to the Hugging Face Hub.

`model_directory` writes what `from_pretrained` reads, `card` describes it, `queue` keeps on disk what is to be uploaded,
`commit` uploads one entry of it, exactly once, `sender` does so in a process next to the training, `uploads` is what a run
has of all that. Nothing here imports a heavy library.
"""
