"""From text and tasks to training rows.

`documents` reads files, `text` splits and tokenises them, `shards` is the folder format,
`packing` cuts rows and defines `Batch`, `corpora` names real text, `synthetic` generates
tasks, `tokenizer` stands between text and ids.
"""
