"""What each pattern measure is: one source for the table, the report and the reference page."""

from __future__ import annotations

from typing import Final

from headwise.heads import MeasureInfo

__all__ = ["PATTERN_MEASURES"]

_CLARK = "Clark et al. 2019, What Does BERT Look At?, section 3"

PATTERN_MEASURES: Final[dict[str, MeasureInfo]] = {
    info.name: info
    for info in (
        MeasureInfo(
            name="entropy",
            unit="nats",
            low=0.0,
            description="Entropy of a row of the pattern over its visible keys; renormalised where a sink takes mass.",
            source="Clark et al. 2019, section 3.3",
        ),
        MeasureInfo(
            name="normalized_entropy",
            unit="share",
            low=0.0,
            high=1.0,
            description="Entropy divided by log(number of visible keys); 1 is uniform. Rows with one key are left out.",
            source="Vig and Belinkov 2019, Analyzing the Structure of Attention, section 4",
        ),
        MeasureInfo(
            name="max_weight",
            unit="weight",
            low=0.0,
            high=1.0,
            description="Largest weight of a row.",
            source="Voita et al. 2019, Analyzing Multi-Head Self-Attention, section 4 (confidence)",
        ),
        MeasureInfo(
            name="previous_weight",
            unit="weight",
            low=0.0,
            high=1.0,
            description="Weight on the key one position before the query, over rows that can see it.",
            source=_CLARK,
        ),
        MeasureInfo(
            name="next_weight",
            unit="weight",
            low=0.0,
            high=1.0,
            description="Weight on the key one position after the query, over rows that can see it.",
            source=_CLARK,
        ),
        MeasureInfo(
            name="own_weight",
            unit="weight",
            low=0.0,
            high=1.0,
            description="Weight on the query's own position, over rows that can see it.",
            source=_CLARK,
        ),
        MeasureInfo(
            name="first_weight",
            unit="weight",
            low=0.0,
            high=1.0,
            description="Weight on the first real key of the sequence, over rows that can see it.",
            source="Xiao et al. 2024, Efficient Streaming Language Models with Attention Sinks, section 3",
        ),
        MeasureInfo(
            name="distance",
            unit="tokens",
            low=0.0,
            description="Mean attended distance of a row: the sum over keys of weight times |query - key position|.",
            source="Vig and Belinkov 2019, section 4 (equation 3)",
        ),
        MeasureInfo(
            name="z_norm",
            unit="L2 norm",
            low=0.0,
            description="Euclidean norm of the head's output z = pattern V, of width d_v.",
            source="Kobayashi et al. 2020, Attention is Not Only a Weight, section 2",
        ),
        MeasureInfo(
            name="result_norm",
            unit="L2 norm",
            low=0.0,
            description="Euclidean norm of z W_O of the head: its term in the residual stream, of width d_model.",
            source="Kobayashi et al. 2020, section 2.2 (equation 3)",
        ),
    )
}
