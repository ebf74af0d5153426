"""A demo that shows the whole product on a laptop: tune a 135M model to write SQL, and measure it.

`smollm2` finds a small chat model in a pip package, `make_text_to_sql` made the bundled questions,
`answers` lets a model answer them and `score` runs what it wrote. Nothing here is needed to train.

Modules, each importing only from those before it: smollm2, worlds, questions, prompts, answers, score,
make_text_to_sql, run.
"""
