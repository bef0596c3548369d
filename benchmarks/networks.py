"""Networks and layers of the zoo, for benchmarks that build with them."""

from __future__ import annotations

from waterflow import zoo_networks

LSTMLanguageModel = zoo_networks.LSTMLanguageModel
conv_bn_relu, linear_relu = zoo_networks.conv_bn_relu, zoo_networks.linear_relu
