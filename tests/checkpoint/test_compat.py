"""A name of transformers that is not public, and that checkpoints record, is where it was."""

from transformers import AutoConfig, LlamaConfig

from toolkit.checkpoint.compat import origin_of


def test_the_origin_of_a_model_is_the_name_and_the_commit_of_its_config(tmp_path) -> None:
    """Fails when: transformers no longer keeps the name it read a config from, or a commit that was set."""
    assert origin_of(None) == origin_of(LlamaConfig()) == (None, None)
    LlamaConfig().save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    config._commit_hash = "abc"
    assert origin_of(config) == (str(tmp_path), "abc")
