"""The bigram baseline is a probability model, and learns what there is to learn."""

import numpy as np

from student_train.bigram import bigram_nats


def test_probabilities_of_all_continuations_sum_to_one():
    rng = np.random.default_rng(0)
    train = [rng.integers(0, 12, 40) for _ in range(30)]
    for before in range(12):
        nats = [bigram_nats(train, [[before, after]], 12) for after in range(12)]
        assert abs(np.exp(-np.array(nats)).sum() - 1) < 1e-9


def test_it_finds_the_entropy_of_a_planted_chain():
    rng = np.random.default_rng(1)
    chain = rng.dirichlet(np.full(8, 0.3), size=8)

    def row(length):
        tokens = [0]
        for _ in range(length):
            tokens.append(rng.choice(8, p=chain[tokens[-1]]))
        return tokens

    train, held_out = [row(200) for _ in range(200)], [row(200) for _ in range(40)]
    pairs = np.concatenate([np.stack([r[:-1], r[1:]]) for r in held_out], axis=1)
    exact = -np.log(chain[pairs[0], pairs[1]]).mean()
    assert exact <= bigram_nats(train, held_out, 8) < exact + 0.01
