"""What each rank does before it meets the others: read the tokenizer and the data, check the run.

Tokenizing can take minutes, and a process group would count them as a hang; a mistake found here ends
every rank with the same line.

Modules, each importing only from those before it: precision, chat_template, run_data,
sampled_lengths, checks.
"""
