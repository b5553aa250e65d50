"""
The six exercises: which functions a student writes, which of the project's tests check them, and
what a failed test means.

make.py takes the functions out of the project's files, grade.py runs the tests. Both read the
project's files at that moment: there is no second copy of any solution, but for exercise 6, whose
example is below.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# number: (title, {file: [function or Class.method, ...]},
#          {test: (points, what it means when it fails)})
EXERCISES = {
    1: (
        "RoPE: frequencies and rotation",
        {"fope.py": ["rope_freqs", "rotation_tables", "apply_rotation"]},
        {
            "test_fope.py::test_rope_frequencies": (
                3, "Frequencies are theta^(-2m/head_dim), m = 0 .. head_dim/2 - 1, 1 comes first."),
            "test_fope.py::test_rotation_is_complex_multiplication": (
                4, "Dimension i must turn together with dimension i + head_dim/2 (not with its "
                "neighbour), by t w_m in radians (not degrees), in the direction of e^{+i w t}."),
            "test_fope.py::test_rotation_is_computed_in_fp32_and_returned_in_the_dtype": (
                1, "Compute in fp32 and give back the dtype of x: bf16 cannot hold large angles."),
            "test_fope.py::test_scores_depend_on_distance_only[rope]": (
                2, "With one content at all positions, RoPE's score may depend on i - j alone."),
        },
    ),
    2: (
        "ALiBi without a mask",
        {"fope.py": ["alibi_slopes", "ALiBi.attend", "ALiBi.scores"]},
        {
            "test_fope.py::test_alibi_slopes": (
                2, "Slopes are 2^(-8h/n_head), h = 1 .. n_head; where n_head is no power of two, "
                "see the docstring."),
            "test_fope.py::test_alibi_bias_is_the_published_one": (
                2, "scores() must be the plain scores minus m_h (i - j): no penalty at i = j."),
            "test_fope.py::test_fused_attention_is_softmax_of_the_scores[640-alibi]": (
                3, "attend() must be the softmax of your scores(). Is key 0 penalised most, and "
                "does no query see later keys?"),
            "test_fope.py::test_fused_attention_has_the_gradients_of_the_scores[alibi]": (
                1, "attend() has other gradients than softmax of scores(): is a part detached?"),
            "test_fope.py::test_alibi_stays_linear_in_bf16_at_8192": (
                2, "bf16 holds integers exactly only up to 256: one column with j in it is "
                "rounded. Split j into two columns."),
        },
    ),
    3: (
        "FoPE's floor",
        {"fope.py": ["above_floor"]},
        {
            "test_fope.py::test_floor_keeps_exactly_the_frequencies_that_complete_a_cycle": (
                6, "Keep w >= 2 pi / train_len, in the order they come, and nothing else."),
            "test_fope.py::test_floor_belongs_to_the_training_length": (
                2, "Reading a longer text must not change what is kept: the floor is that of the "
                "TRAINING length."),
            "test_fope.py::test_yarn_on_fope_lowers_the_frequencies_and_keeps_the_series": (
                2, "The floor must use the length it is given: a model that reads further keeps "
                "its trained frequencies."),
        },
    ),
    4: (
        "FoPE's Fourier series",
        {"fope.py": ["fourier_tables", "FoPE.identity", "FoPE.draw_noise"]},
        {
            "test_fope.py::test_fope_is_a_fourier_series_per_dimension": (
                3, "The tables must be, for each head, the sums that the docstring gives."),
            "test_fope.py::test_zero_frequency_dimensions_ignore_position": (
                2, "Pairs that do not turn: cos 1 and sin 1 (released) or 0 (paper), everywhere."),
            "test_fope.py::test_released_variant_caps_the_outputs_and_strides_the_identity": (
                1, "With more frequencies than series, weight 1 is at every ceil(kept / K)-th."),
            "test_fope.py::test_noise_has_the_documented_size": (
                1, "The noise is N(0, sigma^2) (paper) or xavier on the 3-D tensor, gain sigma "
                "(released), anew at each call."),
            "test_fope.py::test_identity_coefficients_and_no_floor_are_rope": (
                1, "Without noise and floor FoPE must be RoPE."),
            "test_fope.py::test_coefficients_are_frozen_and_saved": (
                1, "The coefficients are not trained: no parameters, but buffers, and saved."),
            "test_fope.py::test_floor_belongs_to_the_training_length": (
                1, "Tables for a longer text must begin with the tables for a short one: nothing "
                "in them may depend on T."),
        },
    ),
    5: (
        "Passkeys in one forward pass",
        {"evaluation.py": ["task_accuracy"]},
        {
            "test_eval.py::test_a_model_that_knows_the_key_scores_1_and_one_that_does_not_0": (
                4, "A model that always knows the key must score 1, one that never does 0. The "
                "logits at position t are for token t + 1: is your slice off by one?"),
            "test_eval.py::test_one_pass_agrees_with_generation[fope-byte]": (
                4, "Exact match from one pass must be what greedy decoding by token gives."),
            "test_eval.py::test_evaluation_leaves_mode_and_random_state_alone": (
                2, "It must leave model.training and torch's random state as they were."),
        },
    ),
    6: (
        "An embedding of your own",
        {"fope.py": ["MyEmbedding"]},
        {
            "test_fope.py::test_fused_attention_is_softmax_of_the_scores[640-mine]": (
                4, "attend() must be the softmax of scores(), also at 16x the training length."),
            "test_model.py::test_causal[mine]": (
                2, "A token must not change what is predicted before it."),
            "test_model.py::"
            "test_gradients_reach_every_trainable_parameter_and_nothing_frozen[mine]": (
                2, "Every parameter needs a gradient; no buffer may change in a training step."),
            "test_model.py::test_checkpoint_round_trip[mine]": (
                2, "A loaded model must give the same output: is something random not saved?"),
        },
    ),
}  # fmt: skip

# Exercise 6 has no right answer; this one, which scores full marks, is put at the end of fope.py
# for the occasion.
MY_EMBEDDING = '''

class MyEmbedding(RoPE):
    """
    An embedding of your own. What does a token know about where it is? Say it here, with the
    formula.

    Override rotate where queries and keys change, scores and attend where the logits do (see ALiBi
    here and LearnedBias in baselines.py).
    """

    def rotate(self, q, k):
        half = self.n_head // 2  # the first half of the heads turns, the others see content alone
        turned_q, turned_k = super().rotate(q, k)
        q = torch.cat((turned_q[:, :half], q[:, half:]), dim=1)
        k = torch.cat((turned_k[:, :half], k[:, half:]), dim=1)
        return q, k


POSITION_EMBEDDINGS["mine"] = MyEmbedding
'''


def reference(file):
    """The text of one of the project's files, as the exercises see it."""
    text = (ROOT / file).read_text(encoding="utf-8")
    return text + MY_EMBEDDING if file == "fope.py" else text


def find(text, name):
    """The ast node of a function, class or Class.method in a text; None if there is none."""
    node = ast.parse(text)
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.ClassDef)
        found = (n for n in node.body if isinstance(n, kinds) and n.name == part)
        if (node := next(found, None)) is None:
            return None
    return node


def lines_of(node):
    """The lines of a node, its decorators included, as a slice."""
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    return slice(first - 1, node.end_lineno)


def replace(text, name, source):
    """`text` with its function or class `name` replaced by that of the text `source`."""
    lines, new = text.split("\n"), source.split("\n")
    lines[lines_of(find(text, name))] = new[lines_of(find(source, name))]
    return "\n".join(lines)


def remove_body(text, name, exercise):
    """`text` with the body of `name` removed: signature and docstring stay, and raise an error."""
    node, lines = find(text, name), text.split("\n")
    indent = " " * node.body[0].col_offset
    stub = [f'{indent}raise NotImplementedError("exercise {exercise}: {name} is yours to write")']
    if isinstance(node, ast.ClassDef):
        stub = ["", f"{indent}def rotate(self, q, k):", f"    {stub[0]}"]
    has_docstring = ast.get_docstring(node) is not None
    start = node.body[0].end_lineno if has_docstring else node.body[0].lineno - 1
    lines[start : node.end_lineno] = stub
    return "\n".join(lines)
