! mlfab.f90 - the calls of mlfab.h that a trainer in Fortran needs, for Fortran 2008 with iso_c_binding.
!
! mlfab.h is the manual: what a call does, its errors, and what it costs. Here a context and a configuration are derived
! types, a failure is a negative `status` (0: all went well), and mlfab_last_error gives its text. Arrays must be
! contiguous. Tensors and collectives are of real(4), real(8) or integer(8).
!
!    mpifort -c mlfab.f90                               the module
!    mpicc -O2 -DMLFAB_WITH_MPI=1 -c mlfab.c            the library; without MPI: cc -O2 -c mlfab.c
!
! Over MPI, set 'transport' to 'mpi'. The world is MPI_COMM_WORLD. A program that calls MPI itself begins with
! MPI_Init_thread, at MPI_THREAD_FUNNELED or more.
!
! SPDX-License-Identifier: MIT
module mlfab
  use, intrinsic :: iso_c_binding
  implicit none
  private

  public :: mlfab_context, mlfab_config, mlfab_error
  public :: mlfab_config_init, mlfab_set, mlfab_from_environment, mlfab_open, mlfab_close, mlfab_rank
  public :: mlfab_tensor_add, mlfab_model_start, mlfab_push, mlfab_pull, mlfab_serve
  public :: mlfab_allreduce, mlfab_broadcast, mlfab_barrier, mlfab_last_error, mlfab_name
  public :: mlfab_f32, mlfab_f64, mlfab_i64

  integer(c_int), parameter :: mlfab_f32 = 1, mlfab_f64 = 2, mlfab_i64 = 3
  integer(c_int32_t), parameter :: tensor_all = -1 ! 0xffffffff

  type :: mlfab_context
    private
    type(c_ptr) :: at = c_null_ptr
  end type

  ! The bytes of a C mlfab_config.
  type :: mlfab_config
    private
    integer(c_int64_t), allocatable :: words(:)
  end type

  type :: mlfab_error
    integer :: code = 0
    integer :: rank = -1
    character(len=:), allocatable :: text
  end type

  ! As in mlfab.h.
  type, bind(c) :: c_error
    integer(c_int32_t) :: code, rank, is_server, reserved
    integer(c_int64_t) :: waited_ns
    character(kind=c_char) :: text(296)
  end type
  type, bind(c) :: c_buf
    integer(c_int32_t) :: tensor, reserved
    type(c_ptr) :: data
    integer(c_int64_t) :: count
  end type

  interface
    function c_struct_size(name) bind(c, name='mlfab_struct_size') result(bytes)
      import; character(kind=c_char), intent(in) :: name(*); integer(c_size_t) :: bytes
    end function
    subroutine c_config_init(config) bind(c, name='mlfab_config_init')
      import; type(c_ptr), value :: config
    end subroutine
    function c_config_set(config, name, value, error) bind(c, name='mlfab_config_set') result(code)
      import; type(c_ptr), value :: config; character(kind=c_char), intent(in) :: name(*), value(*)
      type(c_error), intent(out) :: error; integer(c_int) :: code
    end function
    function c_config_from_env(config, error) bind(c, name='mlfab_config_from_env') result(code)
      import; type(c_ptr), value :: config; type(c_error), intent(out) :: error; integer(c_int) :: code
    end function
    function c_open(config, ctx, error) bind(c, name='mlfab_open') result(code)
      import; type(c_ptr), value :: config; type(c_ptr), intent(out) :: ctx; type(c_error), intent(out) :: error
      integer(c_int) :: code
    end function
    function c_close(ctx) bind(c, name='mlfab_close') result(code)
      import; type(c_ptr), intent(inout) :: ctx; integer(c_int) :: code
    end function
    function c_rank(ctx, rank, workers, servers) bind(c, name='mlfab_rank') result(code)
      import; type(c_ptr), value :: ctx; integer(c_int32_t), intent(out) :: rank, workers, servers
      integer(c_int) :: code
    end function
    function c_last_error(ctx, error) bind(c, name='mlfab_last_error') result(code)
      import; type(c_ptr), value :: ctx; type(c_error), intent(out) :: error; integer(c_int) :: code
    end function
    function c_error_name(status) bind(c, name='mlfab_error_name') result(text)
      import; integer(c_int), value :: status; type(c_ptr) :: text
    end function
    function c_tensor_add(ctx, id, dtype, count) bind(c, name='mlfab_tensor_add') result(code)
      import; type(c_ptr), value :: ctx; integer(c_int32_t), value :: id; integer(c_int), value :: dtype
      integer(c_int64_t), value :: count; integer(c_int) :: code
    end function
    function c_model_start(ctx, options, bufs, n) bind(c, name='mlfab_model_start') result(code)
      import; type(c_ptr), value :: ctx, options; type(c_buf), intent(in) :: bufs(*)
      integer(c_int32_t), value :: n; integer(c_int) :: code
    end function
    function c_push(ctx, bufs, n, options, result_p) bind(c, name='mlfab_push') result(code)
      import; type(c_ptr), value :: ctx, options, result_p; type(c_buf), intent(in) :: bufs(*)
      integer(c_int32_t), value :: n; integer(c_int) :: code
    end function
    function c_pull(ctx, bufs, n, options, result_p) bind(c, name='mlfab_pull') result(code)
      import; type(c_ptr), value :: ctx, options, result_p; type(c_buf), intent(in) :: bufs(*)
      integer(c_int32_t), value :: n; integer(c_int) :: code
    end function
    function c_serve(ctx, timeout_ns) bind(c, name='mlfab_serve') result(code)
      import; type(c_ptr), value :: ctx; integer(c_int64_t), value :: timeout_ns; integer(c_int) :: code
    end function
    function c_allreduce(ctx, data, count, dtype, options) bind(c, name='mlfab_allreduce') result(code)
      import; type(c_ptr), value :: ctx, data, options; integer(c_int64_t), value :: count
      integer(c_int), value :: dtype; integer(c_int) :: code
    end function
    function c_broadcast(ctx, root, data, bytes, options) bind(c, name='mlfab_broadcast') result(code)
      import; type(c_ptr), value :: ctx, data, options; integer(c_int32_t), value :: root
      integer(c_int64_t), value :: bytes; integer(c_int) :: code
    end function
    function c_barrier(ctx, options) bind(c, name='mlfab_barrier') result(code)
      import; type(c_ptr), value :: ctx, options; integer(c_int) :: code
    end function
    function c_strlen(text) bind(c, name='strlen') result(n)
      import; type(c_ptr), value :: text; integer(c_size_t) :: n
    end function
  end interface

  ! The sum of every worker's array, in all of them, in place.
  interface mlfab_allreduce
    module procedure allreduce_f32, allreduce_f64, allreduce_i64
  end interface
  ! Worker `root`'s array, in all workers.
  interface mlfab_broadcast
    module procedure broadcast_f32, broadcast_f64, broadcast_i64
  end interface
  ! The model as one array of all tensors, in the order of mlfab_tensor_add; then they have one element type.
  interface mlfab_model_start
    module procedure model_start_f32, model_start_f64, model_start_i64
  end interface
  interface mlfab_push
    module procedure push_f32, push_f64, push_i64
  end interface
  interface mlfab_pull
    module procedure pull_f32, pull_f64, pull_i64
  end interface

contains

  ! ---- opening

  ! Sets all members to their defaults.
  subroutine mlfab_config_init(config)
    type(mlfab_config), intent(out), target :: config
    allocate (config%words((c_struct_size('config'//c_null_char) + 7) / 8))
    call c_config_init(c_loc(config%words))
  end subroutine

  ! Sets one member by name: mlfab_config_set of mlfab.h.
  subroutine mlfab_set(config, name, value, status, error)
    type(mlfab_config), intent(inout), target :: config
    character(len=*), intent(in) :: name, value
    integer, intent(out) :: status
    type(mlfab_error), intent(out), optional :: error
    type(c_error) :: why
    if (.not. allocated(config%words)) call mlfab_config_init(config)
    status = c_config_set(c_loc(config%words), name//c_null_char, value//c_null_char, why)
    if (present(error)) error = converted(status, why)
  end subroutine

  ! Sets members from the environment: mlfab_config_from_env.
  subroutine mlfab_from_environment(config, status, error)
    type(mlfab_config), intent(inout), target :: config
    integer, intent(out) :: status
    type(mlfab_error), intent(out), optional :: error
    type(c_error) :: why
    if (.not. allocated(config%words)) call mlfab_config_init(config)
    status = c_config_from_env(c_loc(config%words), why)
    if (present(error)) error = converted(status, why)
  end subroutine

  subroutine mlfab_open(config, ctx, status, error)
    type(mlfab_config), intent(inout), target :: config
    type(mlfab_context), intent(inout) :: ctx
    integer, intent(out) :: status
    type(mlfab_error), intent(out), optional :: error
    type(c_error) :: why
    type(c_ptr) :: at
    if (.not. allocated(config%words)) call mlfab_config_init(config)
    at = c_null_ptr
    status = c_open(c_loc(config%words), at, why)
    if (status == 0) ctx%at = at
    if (present(error)) error = converted(status, why)
  end subroutine

  subroutine mlfab_close(ctx, status)
    type(mlfab_context), intent(inout) :: ctx
    integer, intent(out) :: status
    status = c_close(ctx%at)
  end subroutine

  ! rank is -1 in a process that is not a worker.
  subroutine mlfab_rank(ctx, rank, workers, servers)
    type(mlfab_context), intent(in) :: ctx
    integer, intent(out) :: rank
    integer, intent(out), optional :: workers, servers
    integer(c_int32_t) :: r, w, s
    r = -1
    w = 0
    s = 0
    if (c_rank(ctx%at, r, w, s) /= 0) r = -1
    rank = r
    if (present(workers)) workers = w
    if (present(servers)) servers = s
  end subroutine

  ! ---- errors

  function mlfab_last_error(ctx) result(error)
    type(mlfab_context), intent(in) :: ctx
    type(mlfab_error) :: error
    type(c_error) :: why
    integer :: status
    status = c_last_error(ctx%at, why)
    error = converted(int(why%code), why)
  end function

  ! The name of a status: MLFAB_ERR_...
  function mlfab_name(status) result(text)
    integer, intent(in) :: status
    character(len=:), allocatable :: text
    character(kind=c_char), pointer :: chars(:)
    type(c_ptr) :: at
    integer :: i, n
    at = c_error_name(int(status, c_int))
    n = int(c_strlen(at))
    call c_f_pointer(at, chars, [n])
    allocate (character(len=n) :: text)
    do i = 1, n
      text(i:i) = chars(i)
    end do
  end function

  function converted(status, why) result(error)
    integer, intent(in) :: status
    type(c_error), intent(in) :: why
    type(mlfab_error) :: error
    integer :: i
    error%code = status
    error%text = ''
    if (status == 0) return
    error%rank = why%rank
    do i = 1, size(why%text)
      if (why%text(i) == c_null_char) exit
      error%text = error%text//why%text(i)
    end do
  end function

  ! ---- the model

  subroutine mlfab_tensor_add(ctx, id, dtype, count, status)
    type(mlfab_context), intent(in) :: ctx
    integer, intent(in) :: id
    integer(c_int), intent(in) :: dtype
    integer(c_int64_t), intent(in) :: count
    integer, intent(out) :: status
    status = c_tensor_add(ctx%at, int(id, c_int32_t), dtype, count)
  end subroutine

  ! All tensors as one array.
  function whole(data, count) result(bufs)
    type(c_ptr), intent(in) :: data
    integer(c_int64_t), intent(in) :: count
    type(c_buf) :: bufs(1)
    bufs(1) = c_buf(tensor_all, 0, data, count)
  end function

  subroutine mlfab_serve(ctx, status)
    type(mlfab_context), intent(in) :: ctx
    integer, intent(out) :: status
    status = c_serve(ctx%at, 0_c_int64_t)
  end subroutine

  subroutine mlfab_barrier(ctx, status)
    type(mlfab_context), intent(in) :: ctx
    integer, intent(out) :: status
    status = c_barrier(ctx%at, c_null_ptr)
  end subroutine

  ! ---- arrays of real(4)

  subroutine model_start_f32(ctx, weights, status)
    type(mlfab_context), intent(in) :: ctx
    real(c_float), intent(inout), contiguous, target :: weights(:)
    integer, intent(out) :: status
    status = c_model_start(ctx%at, c_null_ptr, whole(c_loc(weights), size(weights, kind=c_int64_t)), 1)
  end subroutine
  subroutine push_f32(ctx, update, status)
    type(mlfab_context), intent(in) :: ctx
    real(c_float), intent(in), contiguous, target :: update(:)
    integer, intent(out) :: status
    status = c_push(ctx%at, whole(c_loc(update), size(update, kind=c_int64_t)), 1, c_null_ptr, c_null_ptr)
  end subroutine
  subroutine pull_f32(ctx, weights, status)
    type(mlfab_context), intent(in) :: ctx
    real(c_float), intent(inout), contiguous, target :: weights(:)
    integer, intent(out) :: status
    status = c_pull(ctx%at, whole(c_loc(weights), size(weights, kind=c_int64_t)), 1, c_null_ptr, c_null_ptr)
  end subroutine
  subroutine allreduce_f32(ctx, data, status)
    type(mlfab_context), intent(in) :: ctx
    real(c_float), intent(inout), contiguous, target :: data(:)
    integer, intent(out) :: status
    status = c_allreduce(ctx%at, c_loc(data), size(data, kind=c_int64_t), mlfab_f32, c_null_ptr)
  end subroutine
  subroutine broadcast_f32(ctx, root, data, status)
    type(mlfab_context), intent(in) :: ctx
    integer, intent(in) :: root
    real(c_float), intent(inout), contiguous, target :: data(:)
    integer, intent(out) :: status
    status = c_broadcast(ctx%at, int(root, c_int32_t), c_loc(data), 4_c_int64_t * size(data, kind=c_int64_t), c_null_ptr)
  end subroutine

  ! ---- arrays of real(8)

  subroutine model_start_f64(ctx, weights, status)
    type(mlfab_context), intent(in) :: ctx
    real(c_double), intent(inout), contiguous, target :: weights(:)
    integer, intent(out) :: status
    status = c_model_start(ctx%at, c_null_ptr, whole(c_loc(weights), size(weights, kind=c_int64_t)), 1)
  end subroutine
  subroutine push_f64(ctx, update, status)
    type(mlfab_context), intent(in) :: ctx
    real(c_double), intent(in), contiguous, target :: update(:)
    integer, intent(out) :: status
    status = c_push(ctx%at, whole(c_loc(update), size(update, kind=c_int64_t)), 1, c_null_ptr, c_null_ptr)
  end subroutine
  subroutine pull_f64(ctx, weights, status)
    type(mlfab_context), intent(in) :: ctx
    real(c_double), intent(inout), contiguous, target :: weights(:)
    integer, intent(out) :: status
    status = c_pull(ctx%at, whole(c_loc(weights), size(weights, kind=c_int64_t)), 1, c_null_ptr, c_null_ptr)
  end subroutine
  subroutine allreduce_f64(ctx, data, status)
    type(mlfab_context), intent(in) :: ctx
    real(c_double), intent(inout), contiguous, target :: data(:)
    integer, intent(out) :: status
    status = c_allreduce(ctx%at, c_loc(data), size(data, kind=c_int64_t), mlfab_f64, c_null_ptr)
  end subroutine
  subroutine broadcast_f64(ctx, root, data, status)
    type(mlfab_context), intent(in) :: ctx
    integer, intent(in) :: root
    real(c_double), intent(inout), contiguous, target :: data(:)
    integer, intent(out) :: status
    status = c_broadcast(ctx%at, int(root, c_int32_t), c_loc(data), 8_c_int64_t * size(data, kind=c_int64_t), c_null_ptr)
  end subroutine

  ! ---- arrays of integer(8)

  subroutine model_start_i64(ctx, weights, status)
    type(mlfab_context), intent(in) :: ctx
    integer(c_int64_t), intent(inout), contiguous, target :: weights(:)
    integer, intent(out) :: status
    status = c_model_start(ctx%at, c_null_ptr, whole(c_loc(weights), size(weights, kind=c_int64_t)), 1)
  end subroutine
  subroutine push_i64(ctx, update, status)
    type(mlfab_context), intent(in) :: ctx
    integer(c_int64_t), intent(in), contiguous, target :: update(:)
    integer, intent(out) :: status
    status = c_push(ctx%at, whole(c_loc(update), size(update, kind=c_int64_t)), 1, c_null_ptr, c_null_ptr)
  end subroutine
  subroutine pull_i64(ctx, weights, status)
    type(mlfab_context), intent(in) :: ctx
    integer(c_int64_t), intent(inout), contiguous, target :: weights(:)
    integer, intent(out) :: status
    status = c_pull(ctx%at, whole(c_loc(weights), size(weights, kind=c_int64_t)), 1, c_null_ptr, c_null_ptr)
  end subroutine
  subroutine allreduce_i64(ctx, data, status)
    type(mlfab_context), intent(in) :: ctx
    integer(c_int64_t), intent(inout), contiguous, target :: data(:)
    integer, intent(out) :: status
    status = c_allreduce(ctx%at, c_loc(data), size(data, kind=c_int64_t), mlfab_i64, c_null_ptr)
  end subroutine
  subroutine broadcast_i64(ctx, root, data, status)
    type(mlfab_context), intent(in) :: ctx
    integer, intent(in) :: root
    integer(c_int64_t), intent(inout), contiguous, target :: data(:)
    integer, intent(out) :: status
    status = c_broadcast(ctx%at, int(root, c_int32_t), c_loc(data), 8_c_int64_t * size(data, kind=c_int64_t), c_null_ptr)
  end subroutine
end module
