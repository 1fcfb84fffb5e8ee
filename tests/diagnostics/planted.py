"""Mistakes that are planted into copies of the recipes, and the check that is to find each.

A mistake is (recipe, [(what a line of it reads, what it reads with the mistake), ...], flags, check, what is on the line that is
named, or None where no line is known).
"""

from pathlib import Path

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
Mistake = tuple[str, list[tuple[str, str]], list[str], str, str | None]

_SFT_LOSS = "    loss_fn = partial(tk.causal_lm_loss, label_smoothing_factor=config.label_smoothing_factor, z_loss=config.z_loss)\n"
_SFT_COLLATE = "    collate = tk.collate_packed if config.packing else tk.collate_padded\n"
_OWN_LOSS = """
    def loss_fn(model, micro_batch, totals):
        import torch
        inputs = {{name: value for name, value in micro_batch.items() if name not in ("labels", "supervised_positions"{left_out})}}
        logits = model(**inputs).logits.float()
        labels = micro_batch["labels"]
        loss = torch.nn.functional.cross_entropy({compared}, reduction="sum")
        return {normalized}, {{}}

"""
_SHIFTED = "logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()"
_OWN_COLLATE = """
    def collate(documents):
        micro_batch = tk.{function}
        {changed}
        micro_batch.pop("supervised_positions")
        return micro_batch

"""
_CHANGED = """    given = collate

    def collate(documents):
        import torch
        micro_batch = given(documents)
        values = micro_batch["{0}"]
        return {{**micro_batch, "{0}": {1}}}

    train, evaluation ="""
_PAIRS = "        return tk.preference_loss(policy, before, totals, **loss_values)\n"
_UPDATES = "            updates = tk.policy_batches(\n"
_TORCH = ("import toolkit as tk\n", "import torch\n\nimport toolkit as tk\n")
_PADDED = "collate_padded(documents, tokenizer.pad_token_id)"
_CLASS_LOSS = "    model, optimizer = accelerator.prepare(model, optimizer)\n"
_BASIC_OPTIMIZER = "    optimizer, schedule = tk.build_optimizer(model, config, train.num_steps)\n"
_RATES = "            for group, rate in zip(optimizer.param_groups, schedule(batch.position / train.examples_to_consume), strict=True):\n"


def own_loss(compared: str = _SHIFTED, normalized: str = 'loss / totals["tokens"]', left_out: str = "") -> str:
    return _OWN_LOSS.format(compared=compared, normalized=normalized, left_out=left_out)


def own_collate(changed: str, function: str = _PADDED) -> str:
    return _OWN_COLLATE.format(changed=changed, function=function)


MISTAKES: dict[str, Mistake] = {
    # rows, labels and masks
    "rows cut in the collate function": (
        "accelerated", [("    train, evaluation =", '''    given = collate

    def collate(documents):
        for document in documents:
            document["input_ids"] = document["input_ids"][:8]
        return given(documents)

    train, evaluation =''')], [], "tokens", "def collate",
    ),
    "a mask of ones over padding": (
        "accelerated", [("    train, evaluation =", _CHANGED.format("attention_mask", "torch.ones_like(values)"))],
        ["--row-layout", "padded"], "alone", None,
    ),
    "labels a token late": (
        "token_classification", [("    train, evaluation =", _CHANGED.format("labels", "values.roll(1, dims=1)"))],
        [], "masks", "def collate",
    ),
    "an end behind the answer": (
        "question_answering", [("    train, evaluation =", _CHANGED.format("end_positions", "values + (values > 0).long()"))],
        [], "spans", "def collate",
    ),
    "a decoder that begins with another token than in generation": (
        "seq2seq", [("decoder_start_token_id=first", "decoder_start_token_id=5")], [], "shift", None,
    ),
    "special tokens to be found": (
        "masked_lm", [("    collate = tk.collate_packed", '''    masks = partial(masks, is_special=masks.keywords["is_special"] & False)
    collate = tk.collate_packed''')], [], "masks", None,
    ),
    "unshifted labels": (
        "sft", [(_SFT_LOSS, own_loss("logits.flatten(0, 1), labels.flatten()"))], [], "shift", "logits = model(",
    ),
    "labels shifted twice": (
        "sft", [(_SFT_COLLATE, own_collate(
            'micro_batch["labels"] = micro_batch["labels"].roll(-1, 1); micro_batch["labels"][:, -1] = -100'))],
        ["--no-packing"], "shift", None,
    ),
    "a mask over padding only": (
        "sft", [(_SFT_COLLATE, own_collate(
            'micro_batch["labels"] = micro_batch["input_ids"].masked_fill(micro_batch["attention_mask"] == 0, -100)'))],
        ["--no-packing"], "masks", "def collate",
    ),
    "prompts learned": ("sft", [("tk.tokenize_for_sft", "tk.tokenize_for_lm")], [], "masks", None),
    "EOS masked": (
        "sft", [(_SFT_COLLATE, own_collate(
            'micro_batch["labels"][micro_batch["labels"] == tokenizer.convert_tokens_to_ids("<|im_end|>")] = -100'))],
        ["--no-packing"], "ends", "def collate",
    ),
    "nothing hidden in the evaluation": ("masked_lm", [(", augment_evaluation=masks", "")], [], "masks", None),
    "nothing hidden": ("masked_lm", [(", augment=masks, augment_evaluation=masks", "")], [], "masks", None),
    "padding supervised": (
        "sft", [(_SFT_COLLATE, own_collate('micro_batch["labels"][micro_batch["attention_mask"] == 0] = tokenizer.pad_token_id'))],
        ["--no-packing"], "padding", "def collate",
    ),
    "the decoder sees the target": (
        "seq2seq", [("    train, evaluation =", '''    given = collate

    def collate(documents):
        micro_batch = given(documents)
        micro_batch["decoder_input_ids"] = micro_batch["labels"].clamp_min(0)
        return micro_batch

    train, evaluation =''')], [], "shift", "def collate",
    ),
    "spans exchanged in the collate function": (
        "question_answering", [("    train, evaluation =", '''    given = collate

    def collate(windows):
        micro_batch = given(windows)
        starts, ends = micro_batch["start_positions"], micro_batch["end_positions"]
        return {**micro_batch, "start_positions": ends, "end_positions": starts}

    train, evaluation =''')], [], "spans", "def collate",
    ),
    "spans exchanged in the loss": (
        "question_answering", [("    loss_fn = tk.question_answering_loss\n", '''
    def loss_fn(model, micro_batch, totals):
        from torch.nn.functional import cross_entropy
        output = model(input_ids=micro_batch["input_ids"], attention_mask=micro_batch["attention_mask"])
        losses = cross_entropy(output.end_logits, micro_batch["start_positions"], reduction="sum")
        losses = losses + cross_entropy(output.start_logits, micro_batch["end_positions"], reduction="sum")
        return losses / 2 / totals["examples"], {}

''')], [], "spans", "output = model(",
    ),
    "spans exchanged in the rows": (
        "question_answering", [("    tk.print_data_report(", '''    exchanged = {"start_positions": "end_positions", "end_positions": "start_positions"}
    splits["train"] = splits["train"].rename_columns(exchanged)
    tk.print_data_report(''')], [], "spans", None,
    ),
    # who sees whom
    "packed without bounds": (
        "sft", [(_SFT_LOSS, own_loss(left_out=', "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"').replace(
            "model(**inputs)", 'model(**inputs, attention_mask=torch.ones_like(inputs["input_ids"]))'))],
        [], "alone", "def loss_fn",
    ),
    "no attention mask": (
        "accelerated", [(_CLASS_LOSS, _CLASS_LOSS + '''    right = loss_fn

    def loss_fn(model, micro_batch, totals):
        micro_batch = {name: value for name, value in micro_batch.items() if name != "attention_mask"}
        return right(model, micro_batch, totals)

''')], ["--row-layout", "padded"], "padding", "return right(",
    ),
    "padding on the left": (
        "accelerated", [("    collate = partial(tk.collate_padded, pad_token_id=tokenizer.pad_token_id, layout=layout)\n", '''
    def collate(documents):
        micro_batch = tk.collate_padded(documents, pad_token_id=tokenizer.pad_token_id)
        return {name: value.flip(1) if value.dim() == 2 else value for name, value in micro_batch.items()}

''')], ["--row-layout", "padded"], "padding", "def collate",
    ),
    # the mean
    "a loss divided by the number of micro-batches": (
        "basic", [("part.backward()", "(part / len(batch.micro_batches)).backward()")], [], "split", "part, _ = loss_fn(",
    ),
    "a mean of means": (
        "sft", [(_SFT_LOSS, own_loss(normalized="loss / (labels != -100).sum()"))], ["--no-packing"], "split", "logits = model(",
    ),
    "a sum in place of a mean": ("sft", [(_SFT_LOSS, own_loss(normalized="loss"))], [], "start", "logits = model("),
    "the sign of the loss": (
        "accelerated", [(_CLASS_LOSS, _CLASS_LOSS + '''    right = loss_fn

    def loss_fn(model, micro_batch, totals):
        loss, values = right(model, micro_batch, totals)
        return -loss, values

''')], [], "start", "loss, values = right(",
    ),
    "a spread that one example has not": (
        "sft", [(_SFT_LOSS, own_loss(normalized='loss / totals["tokens"] + 0 * logits.mean((1, 2)).std()'))], ["--no-packing"],
        "finite", "logits = model(",
    ),
    "a softmax before the cross-entropy": (
        "accelerated", [(_CLASS_LOSS, _CLASS_LOSS + '''    def loss_fn(model, micro_batch, totals):
        import torch
        inputs = {name: value for name, value in micro_batch.items() if name != "labels"}
        probabilities = model(**inputs).logits.softmax(-1)
        loss = torch.nn.CrossEntropyLoss(reduction="sum")(probabilities, micro_batch["labels"])
        return loss / totals["examples"], {}

''')], ["--row-layout", "padded"], "start", "torch.nn.CrossEntropyLoss(",
    ),
    # optimizer and schedule
    "an optimizer without the head": (
        "basic", [(_BASIC_OPTIMIZER, _BASIC_OPTIMIZER + "    optimizer = torch.optim.AdamW(model.bert.parameters(), lr=config.learning_rate)\n"),
                  (_RATES, "            for group, rate in zip(optimizer.param_groups, [config.learning_rate], strict=True):\n")],
        [], "trained", "torch.optim.AdamW(",
    ),
    "a schedule stepped per micro-batch": (
        "basic", [(_BASIC_OPTIMIZER, '''    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=train.num_steps)
'''), (_RATES, "            for group, rate in [(dict(), 0.0)]:\n"), ("                part.backward()\n", "                part.backward()\n                scheduler.step()\n")],
        ["--weight-decay", "0"], "rates", "scheduler.step()",
    ),
    "progress counted in micro-batches": (
        "accelerated", [("rates = schedule(run.progress, run.objective)", "rates = schedule(len(batch.micro_batches) * run.progress)")],
        [], "rates", "tk.train_step(",
    ),
    "a rate of its own": (
        "basic", [(_BASIC_OPTIMIZER, "    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.0)\n"),
                  (_RATES, "            for group, rate in [(dict(), 0.0)]:\n")],
        ["--weight-decay", "0"], "rates", "torch.optim.AdamW(",
    ),
    "a detached adapter": (
        "lora", [("    model = tk.add_adapter(model, config, tokenizer)\n", ""),
                 ("    model, optimizer = accelerator.prepare(", "    model = tk.add_adapter(model, config, tokenizer)\n    model, optimizer = accelerator.prepare(")],
        [], "trained", "tk.build_optimizer(",
    ),
    "an adapter that is switched off": (
        "lora", [(_SFT_LOSS, '''    def loss_fn(model, micro_batch, totals):
        with model.disable_adapter():
            return tk.causal_lm_loss(model, micro_batch, totals)

''')], [], "trained", "tk.build_optimizer(",
    ),
    "frozen weights that move": (
        "basic", [("    model.to(device)\n", "    model.to(device)\n    model.bert.embeddings.requires_grad_(False)\n"),
                  ("            optimizer.zero_grad()\n", "            optimizer.zero_grad()\n            for p in model.parameters():\n                p.data.mul_(0.999)\n")],
        [], "trained", None,
    ),
    "norms that decay": (
        "basic", [(_BASIC_OPTIMIZER, _BASIC_OPTIMIZER + "    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)\n"),
                  (_RATES, "            for group, rate in zip(optimizer.param_groups, [config.learning_rate], strict=True):\n")],
        [], "decay", "torch.optim.AdamW(",
    ),
    "decay by hand": (
        "basic", [("                optimizer.step()\n", "                optimizer.step()\n                with torch.no_grad():\n                    for p in model.parameters():\n                        p.mul_(1 - rate * config.weight_decay)\n")],
        ["--weight-decay", "0.1"], "decay", "p.mul_(1 - rate",
    ),
    "decay by hand, of data and before the update": (
        "accelerated", [("            rates = schedule(", "            for p in model.parameters():\n                p.data -= 1e-3 * 0.01 * p.data\n            rates = schedule(")],
        [], "decay", "p.data -= 1e-3",
    ),
    "matrices that decay twice": (
        "lora", [("            rates = schedule(", "            import torch\n            torch._foreach_mul_([p.data for p in model.parameters() if p.requires_grad and p.dim() > 1], 1 - 1e-3)\n            rates = schedule(")],
        ["--weight-decay", "0.1"], "decay", "torch._foreach_mul_(",
    ),
    "an optimizer stepped twice": (
        "basic", [("                optimizer.step()\n", "                optimizer.step()\n                optimizer.step()\n")],
        [], "cleared", "optimizer.step()",
    ),
    "gradients not cleared": ("basic", [("            optimizer.zero_grad()\n", "")], [], "cleared", "optimizer.step()"),
    "gradients not clipped": (
        "basic", [("config.max_grad_norm or float(\"inf\")", "float(\"inf\")")], ["--max-grad-norm", "0.5"], "clipping", "optimizer.step()",
    ),
    # evaluation
    "dropout left on in evaluation": ("basic", [("        model.eval()\n", "")], [], "modes", "parts = ["),
    "dropout off after an evaluation": ("basic", [("        model.train()\n", "")], [], "modes", "part, _ = loss_fn("),
    "a mean of batches in evaluation": (
        "basic", [("        return {f\"eval_{name}\": value for name, value in metrics.finalize(observed).items()}\n", '''        each = [metrics.finalize({name: value.cpu().numpy() for name, value in part.items()}) for part in parts]
        return {f"eval_{name}": sum(one[name] for one in each) / len(each) for name in each[0]}
''')], [], "evaluation", "parts = [",
    ),
    # what is learned
    "labels of other rows": (
        "accelerated", [("    train, evaluation =", '''    import torch
    given = collate

    def collate(documents):
        micro_batch = given(documents)
        micro_batch["labels"] = torch.randint_like(micro_batch["labels"], model.config.num_labels)
        return micro_batch

    train, evaluation =''')], [], "overfit", None,
    ),
    # which way it is learned
    "chosen and rejected exchanged in the loss": (
        "dpo", [("        policy, before = logps(model, pairs)\n", '''        policy, before = logps(model, pairs)
        policy = policy._replace(chosen=policy.rejected, rejected=policy.chosen)
''')], [], "direction", "return tk.pair_logps(",
    ),
    "desirable answers marked as undesirable": (
        "kto", [('answers["desirable"], kl, totals', '~answers["desirable"], kl, totals')], [], "direction", "return tk.answer_logps(",
    ),
    "rewards of rejected answers first": (
        "reward", [("    train, evaluation =", _CHANGED.format("input_ids", "values.roll(len(values) // 2, dims=0)"))],
        ["--pair-layout", "padded"], "direction", None,
    ),
    "labels of documents turned round": (
        "reranker", [("    train, evaluation =", _CHANGED.format("labels", "1 - values"))], [], "direction", None,
    ),
    "labels of documents turned round, each by itself": (
        "reranker", [("    train, evaluation =", _CHANGED.format("labels", "1 - values"))], ["--ranking-loss", "bce"], "direction", None,
    ),
    "the sign of the advantages": (
        "grpo", [('completions["advantages"], completions["mask"]', '-completions["advantages"], completions["mask"]')], [], "direction",
        "tk.rollout_logps(",
    ),
    "the sign of the advantages of tokens": (
        "ppo", [('completions["advantages"], completions["mask"]', '-completions["advantages"], completions["mask"]')], [], "direction",
        "tk.logps_and_values(",
    ),
    "desirable and undesirable answers made likelier alike": (
        "kto", [("        return tk.unpaired_loss(", "        return (before - policy).sum() / totals['examples'], {}\n        return tk.unpaired_loss(")],
        [], "direction", "return tk.answer_logps(",
    ),
    "the sign of the scores of choices": (
        "multiple_choice", [("    loss_fn, metrics = tk.multiple_choice_loss, tk.multiple_choice_metrics\n", '''    metrics = tk.multiple_choice_metrics

    def loss_fn(model, micro_batch, totals):
        return -tk.multiple_choice_loss(model, micro_batch, totals)[0], {}

''')], [], "direction", "return -tk.multiple_choice_loss(",
    ),
    "texts that belong together driven apart": (
        "embedding", [("    files = tk.sentence_files(", "    right = loss\n    loss = lambda texts, rows: (-right(texts, rows)[0], {})\n    files = tk.sentence_files(")],
        [], "direction", None,
    ),
    "texts taken for those of the next example": (
        "embedding", [("    files = tk.sentence_files(", '''    import torch

    def loss(texts, rows):
        anchors, documents = (torch.nn.functional.normalize(each, dim=-1) for each in (texts.anchors, texts.documents))
        others = (torch.arange(len(texts))[rows] + 1) % len(texts)
        return torch.nn.functional.cross_entropy(anchors[rows] @ documents.T / config.temperature, others, reduction="sum"), {}

    files = tk.sentence_files(''')], [], "direction", None,
    ),
    # what a loss is made of
    "a reference that is added": (
        "dpo", [(_PAIRS, '''        margin = (policy.chosen + before.chosen) - (policy.rejected + before.rejected)
        return -torch.nn.functional.logsigmoid(config.beta * margin).sum() / totals["pairs"], {}
'''), _TORCH], [], "direction", "def loss_fn",
    ),
    "a reference of the recipe's own that is added": (
        "kto", [("        return tk.unpaired_loss(policy, before,", "        return tk.unpaired_loss(policy, -before,"),
                ("        before = reference(model, answers)\n", '''        with torch.no_grad():
            before = tk.answer_logps(first, answers)
'''), ("    def logps(model", "    import copy\n\n    first = copy.deepcopy(model).eval()\n\n    def logps(model"), _TORCH],
        [], "direction", "def loss_fn",
    ),
    "a reference of chosen answers alone": (
        "dpo", [(_PAIRS, '''        margin = (policy.chosen - before.chosen) - policy.rejected
        return -torch.nn.functional.logsigmoid(config.beta * margin).sum() / totals["pairs"], {}
'''), _TORCH], [], "direction", "def loss_fn",
    ),
    "a KL that is rewarded in the loss": (
        "grpo", [("        return tk.policy_loss(", '''        apart = logps - completions["reference_logps"]
        kl = ((-apart).expm1() + apart) * completions["mask"]
        gains = (logps - logps.detach()).exp() * completions["advantages"][:, None] * completions["mask"]
        return -(gains + config.beta * kl).sum() / totals["completion_tokens"], {}
        return tk.policy_loss(''')], ["--beta", "0.1"], "direction", "def loss_fn",
    ),
    "a KL that is rewarded in the rewards": (
        "ppo", [("rollouts, beta=config.beta", "rollouts, beta=-config.beta")], [], "direction", "tk.token_advantages(",
    ),
    "z of the answers of the prompts themselves": (
        "kto", [("tk.estimate_kl(accelerator, model, batch, logps_of_mismatched)", "tk.estimate_kl(accelerator, model, batch, logps)")],
        [], "direction", "tk.estimate_kl(",
    ),
    "advantages over the wrong axis": (
        "grpo", [(_UPDATES, "            advantages = (scores - scores.mean(0)) / (scores.std(0) + 1e-4)\n" + _UPDATES)], [], "direction",
        "tk.policy_batches(",
    ),
    "advantages of a transposed table": (
        "grpo", [("rollouts, advantages.flatten(), collate", "rollouts, advantages.T.flatten(), collate")], [], "direction", "tk.policy_batches(",
    ),
    "prompts in the mask of completions": (
        "grpo", [(_UPDATES, '''            given = collate

            def collate(some, advantages, given=given):
                made = given(some, advantages)
                asked = sum(len(each.prompt_ids) for each in some)
                return {**made, "mask": torch.nn.functional.pad(made["mask"], (asked, 0), value=1.0)[:, : made["mask"].shape[1]]}

''' + _UPDATES), _TORCH], [], "masks", "def collate",
    ),
    "padding in the mask of completions": (
        "grpo", [('completions["advantages"], completions["mask"], totals', 'completions["advantages"], completions["mask"] >= 0, totals')],
        [], "masks", "tk.policy_loss(",
    ),
    "values a token late": (
        "ppo", [('            values, completions["old_values"]', '            values.roll(1, 1), completions["old_values"]')], [], "direction", "tk.value_loss(",
    ),
    "returns of values a token late": (
        "ppo", [('"old_values": values}', '"old_values": values.roll(1, 1)}')], [], "direction", "tk.value_loss(",
    ),
    "values that learn the advantages": (
        "ppo", [('completions["old_values"], completions["returns"]', 'completions["old_values"], completions["advantages"]')], [], "direction", "tk.value_loss(",
    ),
    "values that learn to be wrong": (
        "ppo", [("policy_loss + config.vf_coef", "policy_loss - config.vf_coef")], [], "direction", "tk.value_loss(",
    ),
    "a value head that no loss reaches": (
        "ppo", [("            values, completions[\"old_values\"]", "            values.detach(), completions[\"old_values\"]")], [], "trained", None,
    ),
    "what is no document in a softmax": (
        "reranker", [("    model, optimizer = accelerator.prepare(", '''    def loss_fn(model, micro_batch, totals):
        from toolkit.losses.ranking import score_lists
        scores, labels, _ = score_lists(model, micro_batch)
        return -(labels * scores.log_softmax(-1)).sum() / totals["examples"], {}

    model, optimizer = accelerator.prepare(''')], [], "alone", "def loss_fn",
    ),
    "a new head that stays frozen under an adapter": (
        "accelerated", [(_CLASS_LOSS, '''    import peft
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["query", "value"]))
    optimizer, schedule = tk.build_optimizer(model, config, train.num_steps)
''' + _CLASS_LOSS)], ["--row-layout", "padded"], "trained", "tk.build_optimizer(",
    ),
    "a pooling that is not the saved one": (
        "embedding", [("embed = partial(tk.embed_texts, pooling=style.pooling)", 'embed = partial(tk.embed_texts, pooling="last")')], [], "saved", None,
    ),
    "another pooling in the second pass": (
        "embedding", [("tk.cached_gradient_loss(embed)", 'tk.cached_gradient_loss(partial(tk.embed_texts, pooling="cls"))')], [], "saved", None,
    ),
    "a mean over padding": (
        "embedding", [("    embed = partial(tk.embed_texts, pooling=style.pooling)\n", '''
    def embed(model, texts):
        return model(input_ids=texts["input_ids"], attention_mask=texts["attention_mask"]).last_hidden_state.mean(1)

'''), ("layout=tk.choose_text_layout(model)", 'layout="padded"')], [], "saved", "def embed",
    ),
    "a mean over the longest completion": (
        "grpo", [("        return tk.policy_loss(", '''        gains = logps * completions["advantages"][:, None] * completions["mask"]
        return -gains.mean(1).sum() / totals["completions"], {}
        return tk.policy_loss(''')], [], "split", "tk.rollout_logps(",
    ),
    "a copy as reference, in training mode": (
        "dpo", [("    def logps(model", "    import copy\n\n    import torch\n\n    first = copy.deepcopy(model)\n\n    def logps(model"),
                ("        before = reference(model, pairs)\n", "        with torch.no_grad():\n            before = tk.pair_logps(first, pairs)\n")],
        ["--dropout", "0.1"], "modes", "before = tk.pair_logps(",
    ),
    "a sigmoid before the cross-entropy of logits": (
        "reranker", [("    model, optimizer = accelerator.prepare(", '''    def loss_fn(model, micro_batch, totals):
        import torch
        inputs = {name: micro_batch[name] for name in ("input_ids", "attention_mask")}
        scores = model(**inputs).logits.squeeze(-1).sigmoid()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, micro_batch["labels"], reduction="sum")
        return loss / totals["documents"], {}

    model, optimizer = accelerator.prepare(''')], [], "overfit", "binary_cross_entropy_with_logits(",
    ),
    "targets shifted twice in the loss": (
        "seq2seq", [("    loss_fn = partial(tk.seq2seq_loss, label_smoothing_factor=config.label_smoothing_factor)\n", '''
    def loss_fn(model, micro_batch, totals):
        micro_batch.pop("supervised_positions")
        return tk.causal_lm_loss(model, micro_batch, totals)

''')], [], "shift", "return tk.causal_lm_loss(",
    ),
    "a loss at another temperature than sampling": (
        "grpo", [("tk.rollout_logps(model, completions, config.temperature, config.entropy_coef > 0)", "tk.rollout_logps(model, completions)")],
        ["--temperature", "0.6"], "direction", "tk.rollout_logps(",
    ),
    "a teacher in training mode": (
        "sft", [(_SFT_LOSS, '    teacher = tk.load_model("AutoModelForCausalLM", config, tokenizer, packed=config.packing).train()\n'
                 + own_loss().replace("        labels =", "        with torch.no_grad():\n            teacher(**inputs)\n        labels ="))],
        [], "modes", "teacher(**inputs)",
    ),
    # the end of a run, and the data
    "the untrained model is saved": (
        "accelerated", [("    model, optimizer = accelerator.prepare(", "    import copy\n    first = copy.deepcopy(model)\n    model, optimizer = accelerator.prepare("),
                        ("tk.save_model(accelerator, model,", "tk.save_model(accelerator, first,")], [], "saved", None,
    ),
    "state that a resume loses": (
        "accelerated", [("        for batch in run:\n", "        count = 0\n        for batch in run:\n            count += 1\n            model.classifier.bias.data.add_(1e-3 * count)\n")],
        [], "resume", None,
    ),
    "generation does not stop": (
        "sft", [("tk.save_model(accelerator, model, tokenizer, config.output_dir, run.summary, dtype=config.dtype)",
                 'model.save_pretrained(f"{config.output_dir}/model")')], [], "stops", None,
    ),
    "half precision by hand": (
        "accelerated", [("    collate = partial(", "    import torch\n    model.to(torch.bfloat16)\n    collate = partial(")], [], "types", "tk.build_optimizer(",
    ),
    "tokens added too late": (
        "sft", [(_SFT_COLLATE, "    tokenizer.add_tokens([f\"<new{i}>\" for i in range(9)])\n" + _SFT_COLLATE)], [], "tokenizer", None,
    ),
    "evaluation on training rows": (
        "accelerated", [("    tk.print_data_report(", "    splits[\"validation\"] = splits[\"train\"].select(range(32))\n    tk.print_data_report(")],
        [], "leak", None,
    ),
}  # fmt: skip


def copy_with(mistake: Mistake, folder: Path) -> Path:
    """A copy of the recipe with the mistake in it."""
    recipe, changes, _, _, _ = mistake
    text = (RECIPES / f"{recipe}.py").read_text(encoding="utf-8")
    for old, new in changes:
        assert text.count(old) >= 1, f"{recipe}.py no longer reads {old!r}"
        text = text.replace(old, new)
    path = folder / f"{recipe}_copy.py"
    path.write_text(text, encoding="utf-8")
    return path
