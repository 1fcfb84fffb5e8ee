"""TF-IDF of words and of parts of words, next to scikit-learn's."""

import numpy as np
import pytest
from datasets import Dataset
from sklearn.feature_extraction.text import TfidfVectorizer

from toolkit.baselines.word_overlap import parts_of_words, plain_words, retrieval_baselines, tf_idf

DOCUMENTS = ["def read_file(path): return open(path)", "def closeAll(self): pass", "def read(self): self.path = path"]
QUERIES = ["Read the file.", "Close all of them, all.", "What is the path to read?"]


@pytest.mark.parametrize("words", [plain_words, parts_of_words])
def test_vectors_are_those_of_scikit_learn(words) -> None:
    """Up to the order of words. Fails when: counts are not in logarithms, or `tf_idf` reads whole words alone."""
    reference = TfidfVectorizer(sublinear_tf=True, analyzer=words).fit(DOCUMENTS)
    expected = (reference.transform(QUERIES) @ reference.transform(DOCUMENTS).T).toarray()
    found = tf_idf([*QUERIES, *DOCUMENTS], DOCUMENTS, words).to_dense().numpy()
    np.testing.assert_allclose(found[:3] @ found[3:].T, expected, atol=1e-12)


def test_parts_of_words_find_what_words_do_not() -> None:
    """Fails when: both baselines count whole words."""
    rows = Dataset.from_dict({"query": QUERIES[:2], "positive": DOCUMENTS[:2]})
    found = retrieval_baselines({"validation": rows}, at=1)
    assert found == {"chance": 0.5, "TF-IDF on words": 0.0, "TF-IDF on parts of words": 1.0}
