"""Options that commands share: of the cells, of the model, and of training."""

from __future__ import annotations

import argparse
from pathlib import Path

from scbd import _argument_values as values
from scbd.model import TrainSettings


def add_cells(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "cells",
        type=values.path_or_url,
        help="an .h5ad or .zarr with images or features; a table of features (.csv, .tsv, .parquet); or the output of "
        "CellProfiler or DeepProfiler",
    )
    parser.add_argument(
        "--y-key", required=True, nargs="+", help="obs column(s) of the perturbation (several: crossed)"
    )
    parser.add_argument("--e-key", required=True, nargs="+", help="obs column(s) of the environment")
    parser.add_argument(
        "--e-columns",
        choices=["side_by_side", "crossed"],
        help="for several columns: each is an environment of its own (the default), or each combination is one",
    )
    parser.add_argument(
        "--continuous-covariate-keys",
        nargs="+",
        metavar="COLUMN",
        help="obs column(s) of numbers to remove from z_c as well: row, column, time, number of cells",
    )
    parser.add_argument(
        "--obs-columns",
        nargs="+",
        metavar="COLUMN",
        help="for a table of features: columns of numbers that are no features, such as doses (those that other "
        "options name are none either)",
    )
    add_missing(parser)
    parser.add_argument("--out", type=Path, required=True, help="directory to make")
    parser.add_argument("--image-key", default="single_cell_images", help="obsm key of the images")
    parser.add_argument("--channels", nargs="+", help="channels of the images to take, by name or number")
    parser.add_argument("--layer", help="features in place of images: a layer, or X")
    parser.add_argument("--obsm-key", help="features in place of images: an obsm key")
    parser.add_argument(
        "--control", nargs="+", help="label(s) of the controls, such as DMSO, in the columns of --y-key"
    )
    parser.add_argument(
        "--position-key",
        help="for features, with --control: obs column of the position on the plate, whose effect is taken away",
    )


def add_missing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--missing",
        choices=["drop", "median"],
        default="drop",
        help="for a table of features: leave out rows with missing values, or fill in the feature's median (features "
        "that lack more than 5 %% are left out before)",
    )


def add_model(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    model = parser.add_argument_group("model")
    model.add_argument(
        "--encoder",
        default="auto",
        help="small, resnet18, resnet50, densenet121; for features linear or mlp; auto: what suits the cells",
    )
    model.add_argument(
        "--norm",
        choices=["batch", "instance", "group"],
        default="batch",
        help="for images: normalisation of activations",
    )
    model.add_argument("--n-latent", type=int, help="dimension of both embeddings (64; of linear 300)")
    model.add_argument("--temperature", type=float, default=0.1, help="temperature of the losses")
    model.add_argument("--smoothing", type=values.share, help="label smoothing, 0 for none (2/3; of features 0)")
    model.add_argument(
        "--positives",
        choices=["all", "other_environments"],
        default="all",
        help="cells of the perturbation that z_c is brought together with",
    )
    model.add_argument(
        "--invariance",
        choices=["variance", "listing", "formula", "mean", "mass"],
        default="variance",
        help="form of the invariance loss ('listing': as published); each has its own scale of alpha",
    )
    model.add_argument(
        "--image-size", type=values.image_size, metavar="SIDE|HxW", help="for images: resize to this many pixels"
    )
    model.add_argument(
        "--intensity",
        choices=["auto", "scale", "arcsinh", "none"],
        default="auto",
        help="for images: transform of pixels",
    )
    model.add_argument(
        "--no-standardize", dest="standardize", action="store_false", help="keep each channel's mean and scale"
    )
    model.add_argument("--augment", action="store_true", help="for images: random flips and right-angle rotations")
    model.add_argument("--clip", type=float, default=20.0, help="for features: clip at this many standard deviations")
    model.add_argument(
        "--whitening", type=values.word, default="auto", help="for features: within, controls, lda, plda or none"
    )
    return model


def add_training(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    train = parser.add_argument_group("training")
    length = train.add_mutually_exclusive_group()
    length.add_argument("--max-steps", type=int, help="updates")
    length.add_argument("--max-epochs", type=int, help="passes over the training cells")
    train.add_argument("--batch-size", type=int, help="cells per batch (2,048, or all if fewer)")
    train.add_argument(
        "--perturbations-per-batch",
        type=values.count_or_auto,
        default=TrainSettings.perturbations_per_batch,
        help="number, 'auto' or 'none'",
    )
    train.add_argument(
        "--lr", type=float, default=TrainSettings.lr, help="learning rate (0.0001; with small or mlp 0.001)"
    )
    train.add_argument("--encoder-lr", type=float, help="learning rate of the encoders, if different (0 freezes them)")
    train.add_argument("--weight-decay", type=float, default=TrainSettings.weight_decay, help="weight decay")
    train.add_argument(
        "--alpha-warmup", type=int, default=0, metavar="STEPS", help="steps over which alpha rises from 0"
    )
    train.add_argument("--split", help="obs column with train, validation, test; stratified at random without it")
    train.add_argument("--load-best", action="store_true", help="end with the weights of the lowest validation loss")
    train.add_argument("--early-stopping", action="store_true", help="stop when the validation loss stops falling")
    train.add_argument("--accelerator", default=TrainSettings.accelerator, help="cpu, gpu, mps or auto")
    train.add_argument("--precision", default=TrainSettings.precision, help="32-true, bf16-mixed or auto")
    train.add_argument("--preload", choices=["device"], help="keep all images on the device")
    train.add_argument("--compile", action="store_true", help="run both blocks through torch.compile")
    return train
