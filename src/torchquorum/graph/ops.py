"""Which operations a compute task runs for a client: a list of names, and nothing that is not on it.

Checked when a graph is made, on the client, where a mistake can be fixed, and again when one arrives at a compute task, which
trusts no client. What always holds: a name becomes a function only if it is in this list;
no operation here takes a file's name, a callable, a storage or an object, or lets a tensor look beyond its memory.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import torch

from torchquorum.errors import GraphError

SET_GRAD_ENABLED = "torchquorum.set_grad_enabled"

# Operations of ATen by their base name; `name_`, which works in place, is allowed with `name`. Left out: whatever opens
# files (from_file), changes what memory a tensor has (set_, resize_, ...), takes packed or sparse data on trust
# (fbgemm_*, quantized_*, mkldnn_*, sparse constructors), or is private, but for those that exported models hold.
_NAMES = """
__and__ __iand__ __ior__ __ixor__ __lshift__ __or__ __rshift__ __xor__ _adaptive_avg_pool2d _adaptive_avg_pool3d
_assert_async _assert_scalar _assert_tensor_metadata _batch_norm_impl_index _cdist_forward _conj _convolution
_embedding_bag _fft_c2c _fft_c2r _fft_r2c _functional_assert_scalar _fused_rms_norm _linalg_det _linalg_eigh
_linalg_slogdet _linalg_solve_ex _linalg_svd _local_scalar_dense _log_softmax _masked_softmax
_native_batch_norm_legit _native_batch_norm_legit_functional _pack_padded_sequence _pad_packed_sequence
_safe_softmax _scaled_dot_product_attention_math _scaled_dot_product_flash_attention_for_cpu _shape_as_tensor
_softmax _to_copy _trilinear _unique2 _unsafe_index _unsafe_view _upsample_bicubic2d_aa _upsample_bilinear2d_aa
_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d _weight_norm _weight_norm_interface
abs absolute acos acosh adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d
adaptive_max_pool2d adaptive_max_pool3d add addbmm addcdiv addcmul addmm addmv addr adjoint affine_grid_generator
alias all allclose alpha_dropout amax amin aminmax angle any arange arccos arccosh arcsin arcsinh arctan arctan2
arctanh argmax argmin argsort argwhere as_strided as_strided_scatter asin asinh atan atan2 atanh atleast_1d
atleast_2d atleast_3d avg_pool1d avg_pool2d avg_pool3d baddbmm bartlett_window batch_norm bernoulli bilinear
binary_cross_entropy binary_cross_entropy_with_logits bincount binomial bitwise_and bitwise_left_shift bitwise_not
bitwise_or bitwise_right_shift bitwise_xor blackman_window block_diag bmm broadcast_tensors broadcast_to bucketize
cartesian_prod cat cauchy cdist ceil celu chain_matmul chalf channel_shuffle cholesky cholesky_inverse
cholesky_solve chunk clamp clamp_max clamp_min clip clone col2im column_stack combinations complex concat
concatenate conj conj_physical constant_pad_nd contiguous conv1d conv2d conv3d conv_depthwise3d conv_tbc
conv_transpose1d conv_transpose2d conv_transpose3d convolution copy copysign corrcoef cos cosh cosine_embedding_loss
cosine_similarity count_nonzero cov cross cross_entropy_loss ctc_loss cummax cummin cumprod cumsum
cumulative_trapezoid deg2rad det detach diag diag_embed diagflat diagonal diagonal_scatter diff digamma dist div
divide dot dropout dsplit dstack einsum elu embedding embedding_bag embedding_renorm empty empty_like empty_permuted
empty_strided eq equal erf erfc erfinv exp exp2 expand expand_as expm1 exponential eye feature_alpha_dropout
feature_dropout fft_fft fft_fft2 fft_fftfreq fft_fftn fft_fftshift fft_hfft fft_hfft2 fft_hfftn fft_ifft fft_ifft2
fft_ifftn fft_ifftshift fft_ihfft fft_ihfft2 fft_ihfftn fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2
fft_rfftfreq fft_rfftn fill fill_diagonal_ fix flatten flip fliplr flipud float_power floor floor_divide fmax fmin
fmod frac fractional_max_pool2d fractional_max_pool3d frexp frobenius_norm full full_like gather gcd ge gelu
geometric geqrf ger glu gradient greater greater_equal grid_sampler grid_sampler_2d grid_sampler_3d group_norm gru
gru_cell gt hamming_window hann_window hardshrink hardsigmoid hardswish hardtanh heaviside hinge_embedding_loss
histc histogram histogramdd hsplit hstack huber_loss hypot i0 igamma igammac im2col imag index index_add index_copy_
index_fill index_put index_reduce index_select inner instance_norm inverse isclose isfinite isin isinf isnan
isneginf isposinf isreal istft item kaiser_window kl_div kron kthvalue l1_loss layer_norm lcm ldexp le leaky_relu
lerp less less_equal lgamma lift_fresh lift_fresh_copy linalg_cholesky linalg_cholesky_ex linalg_cond linalg_cross
linalg_det linalg_diagonal linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_householder_product
linalg_inv linalg_inv_ex linalg_ldl_factor linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq linalg_lu
linalg_lu_factor linalg_lu_factor_ex linalg_lu_solve linalg_matmul linalg_matrix_exp linalg_matrix_norm
linalg_matrix_power linalg_matrix_rank linalg_multi_dot linalg_norm linalg_pinv linalg_qr linalg_slogdet
linalg_solve linalg_solve_ex linalg_solve_triangular linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve
linalg_vander linalg_vecdot linalg_vector_norm linear linspace log log10 log1p log2 log_normal log_sigmoid
log_sigmoid_forward log_softmax logaddexp logaddexp2 logcumsumexp logdet logical_and logical_not logical_or
logical_xor logit logspace logsumexp lstm lstm_cell lt lu_solve lu_unpack mH mT margin_ranking_loss masked_fill
masked_scatter masked_select matmul matrix_H matrix_exp matrix_power max max_pool1d max_pool1d_with_indices
max_pool2d max_pool2d_with_indices max_pool3d max_pool3d_with_indices max_unpool2d max_unpool3d maximum mean median
meshgrid min minimum mish mm mode moveaxis movedim mse_loss msort mul multi_margin_loss multilabel_margin_loss
multilabel_margin_loss_forward multinomial multiply mv mvlgamma nan_to_num nanmean nanmedian nanquantile nansum
narrow native_batch_norm native_channel_shuffle native_dropout native_group_norm native_layer_norm native_norm ne
neg negative new_empty new_empty_strided new_full new_ones new_zeros nextafter nll_loss nll_loss2d
nll_loss2d_forward nll_loss_forward nll_loss_nd nonzero nonzero_numpy nonzero_static norm norm_except_dim normal
not_equal nuclear_norm numpy_T one_hot ones ones_like orgqr ormqr outer pad pad_sequence pairwise_distance pdist
permute pinverse pixel_shuffle pixel_unshuffle poisson poisson_nll_loss polar polygamma positive pow prelu prod put
qr quantile rad2deg rand rand_like randint randint_like randn randn_like random randperm range ravel real reciprocal
reflection_pad1d reflection_pad2d reflection_pad3d relu relu6 remainder renorm repeat repeat_interleave
replication_pad1d replication_pad2d replication_pad3d reshape reshape_as resolve_conj resolve_neg rms_norm rnn_relu
rnn_relu_cell rnn_tanh rnn_tanh_cell roll rot90 round row_stack rrelu rrelu_with_noise rsqrt rsub scalar_tensor
scaled_dot_product_attention scatter scatter_add scatter_reduce searchsorted segment_reduce select select_scatter
selu sgn sigmoid sign signbit silu sin sinc sinh slice slice_scatter slogdet smooth_l1_loss soft_margin_loss softmax
softplus softshrink sort special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v
special_chebyshev_polynomial_w special_digamma special_entr special_erf special_erfc special_erfcx special_erfinv
special_exp2 special_expit special_expm1 special_gammainc special_gammaincc special_gammaln
special_hermite_polynomial_h special_hermite_polynomial_he special_i0 special_i0e special_i1 special_i1e
special_laguerre_polynomial_l special_legendre_polynomial_p special_log1p special_log_ndtr special_log_softmax
special_logit special_logsumexp special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
special_modified_bessel_k1 special_multigammaln special_ndtr special_ndtri special_polygamma special_psi
special_round special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1
special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v
special_shifted_chebyshev_polynomial_w special_sinc special_softmax special_spherical_bessel_j0 special_xlog1py
special_xlogy special_zeta split split_with_sizes sqrt square squeeze stack std std_mean stft sub subtract sum
sum_to_size svd swapaxes swapdims sym_constrain_range sym_constrain_range_for_size sym_is_contiguous sym_numel
sym_size sym_stride t take take_along_dim tan tanh tensor_split tensordot threshold tile to topk trace transpose
trapezoid trapz triangular_solve tril tril_indices triplet_margin_loss triu triu_indices true_divide trunc type_as
unbind unflatten unfold uniform unique_consecutive unique_dim unique_dim_consecutive unsafe_chunk unsafe_split
unsafe_split_with_sizes unsqueeze upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d
upsample_nearest2d upsample_nearest3d upsample_trilinear3d vander var var_mean vdot view view_as view_as_complex
view_as_real vsplit vstack where xlogy zero zeros zeros_like
"""
OPERATIONS = frozenset(_NAMES.split())

# Arithmetic on sizes: the size of a batch is known only when the batch is there.
_NUMBERS: dict[str, Callable[..., Any]] = {
    **{
        f"operator.{f.__name__}": f
        for f in (
            operator.add,
            operator.sub,
            operator.mul,
            operator.floordiv,
            operator.truediv,
            operator.mod,
            operator.neg,
            operator.eq,
            operator.ne,
            operator.lt,
            operator.le,
            operator.gt,
            operator.ge,
            operator.getitem,
        )
    },
    **{
        f"torch.{f.__name__}": f
        for f in (torch.sym_max, torch.sym_min, torch.sym_float, torch.sym_int, torch.sym_not, torch.sym_ite)
    },
}
_BY_FUNCTION = {f: name for name, f in _NUMBERS.items()}
_ATEN_NAME = re.compile(r"aten\.(?P<base>[A-Za-z0-9_]+)\.(?P<overload>[A-Za-z0-9_]+)")


def find(name: str) -> Callable[..., Any]:
    """Returns the function of an operation that may be run.

    Raises:
        GraphError: There is no such operation, or it is not one that compute tasks run.
    """
    if name in _NUMBERS:
        return _NUMBERS[name]
    match = _ATEN_NAME.fullmatch(name)
    if match is None or not _allowed(match["base"]) or "out" in match["overload"].split("_"):
        raise GraphError(f"operation {name[:80]!r}: not one that a compute task runs; docs/graph.md says which are")
    packet = getattr(torch.ops.aten, match["base"], None)
    if packet is None or match["overload"] not in packet.overloads():
        raise GraphError(
            f"operation {name!r}: this torch ({torch.__version__}) does not have it; install the same on all tasks"
        )
    return getattr(packet, match["overload"])


def name_of(target: object) -> str:
    """Returns the name under which an operation of an exported graph travels.

    Raises:
        GraphError: Compute tasks do not run it.
    """
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "aten":
        name = str(target)
        find(name)
        return name
    name = _BY_FUNCTION.get(target) if callable(target) else None  # pyright: ignore[reportArgumentType]
    if name is None:
        shown = getattr(target, "__name__", str(target))
        raise GraphError(
            f"the model uses {shown}, which compute tasks do not run: they run the operations of torch itself (aten). "
            "Write that part with ordinary tensor operations, or train between-graph, where every worker has your code"
        )
    return name


def _allowed(base: str) -> bool:
    return base in OPERATIONS or (base.endswith("_") and not base.startswith("__") and base[:-1] in OPERATIONS)
